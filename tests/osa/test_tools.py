"""Models under PyTorch's own tools: torch.func, data parallel training, pruning and quantisation."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune

import osa

NAMES = ["osa_exact", "osa_qr", "osa_ns", "vit", "espa", "vskipinit"]
IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def create(name):
    sizes = dict(image_size=8, embed_dim=16, num_heads=2, depth=5)
    model = osa.create_model(name, generator=torch.Generator().manual_seed(0), **sizes)
    for parameter in model.parameters():  # away from zeros
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return model


def gradients(name):
    model = create(name)
    model(IMAGES).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_close(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * (theirs.norm() + 0.1)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of softmax under vmap
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_each_image(name):
    model = create(name)
    loss = lambda parameters, image: functional_call(model, parameters, (image[None],)).square().mean()  # noqa: E731
    each = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), IMAGES)
    assert_close([gradient.mean(0) for gradient in each.values()], gradients(name))


def in_data_parallel(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for name in ("osa_exact", "espa"):
        model = nn.parallel.DistributedDataParallel(create(name))
        model(IMAGES.chunk(2)[rank]).square().mean().backward()
        assert_close([parameter.grad for parameter in model.parameters()], gradients(name))
    dist.destroy_process_group()


def test_two_processes_have_the_gradients_of_one(tmp_path):
    torch.multiprocessing.spawn(in_data_parallel, (str(tmp_path / "meeting"),), nprocs=2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own
def test_shards_have_the_gradients_of_the_whole(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for name in NAMES:
            model, mesh = create(name), init_device_mesh("cpu", (1,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            model(IMAGES).square().mean().backward()
            assert_close([parameter.grad.full_tensor() for parameter in model.parameters()], gradients(name))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_a_pruned_weight_is_the_weight(name):
    pruned, plain = create(name), create(name)
    linear = pruned.blocks[0].attention.query
    prune.l1_unstructured(linear, "weight", amount=0.5)
    plain.blocks[0].attention.query.weight.data.mul_(linear.weight_mask)
    assert linear.weight_mask.mean() == 0.5
    assert torch.equal(pruned(IMAGES), plain(IMAGES))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_quantised_layers_are_called(name):
    model = create(name).eval()
    attention = quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8).blocks[0].attention
    x = torch.randn(2, 5, 16)
    for actual, expected in zip(attention.project(x), model.blocks[0].attention.project(x), strict=True):
        assert not torch.equal(actual, expected)
        assert (actual - expected).abs().max() < 0.05 * expected.abs().max()
