# docker build -t osa . && docker run --rm osa
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /osa
COPY Makefile requirements*.txt ./
COPY pipeline/tools/install.py pipeline/tools/
RUN make setup-all TORCH=cpu
COPY . .
CMD ["make", "test"]
