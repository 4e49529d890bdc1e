"""Downloads data sets, converts the user's images, and loads them as tensors."""
