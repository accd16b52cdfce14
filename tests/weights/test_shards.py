"""Rows of parameters on several processes; `test_distributed` trains with them. Here a process only plays its rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from conftest import TRAINER_KNOWS_SHARDS, make_dataset, make_model
from lab.map import MAPConfig, MAPTrainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_deelbo import DEELBoTrainer, GaussianPosterior
from hf_deelbo.weights.blocks import BLOCK_SIZE, blocks_of, draw_sample, held_rows, local, mesh_of
from hf_deelbo.weights.shards import check_sharding, class_of, copy_whole_, is_first_process, shard_like


@contextmanager
def playing(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def on_each_rank(world_size: int, function: Callable[[DeviceMesh], torch.Tensor]) -> list[torch.Tensor]:
    results = []
    for rank in range(world_size):
        with playing(rank, world_size) as mesh:
            results.append(function(mesh))
    return results


def empty_parameter(shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    return torch.distributed.tensor.zeros(*shape, device_mesh=mesh, placements=[Shard(0)])


# fewer rows than processes, as many, some that divide and some that do not, and one process without a row
@pytest.mark.parametrize(("num_rows", "world_size"), [(1, 2), (3, 3), (7, 2), (8, 4), (3, 4), (9, 4)])
class TestRows:
    """As `torch.chunk` cuts, and so FSDP2."""

    def test_each_process_holds_its_chunk(self, num_rows, world_size):
        tensor = torch.arange(2.0 * num_rows).view(num_rows, 2)

        def shard(mesh: DeviceMesh) -> tuple[torch.Tensor, tuple[int, int], int]:
            sharded = shard_like(tensor, empty_parameter((num_rows, 5), mesh))
            assert sharded.shape == tensor.shape
            return local(sharded), held_rows(sharded), len(empty_parameter((num_rows, 5), mesh).to_local())

        chunks = tensor.chunk(world_size)
        first = 0
        for rank, (part, held, num_of_parameter) in enumerate(on_each_rank(world_size, shard)):
            expected = chunks[rank] if rank < len(chunks) else tensor[:0]
            assert torch.equal(part, expected), rank
            assert held == (first, len(expected)), rank
            assert num_of_parameter == len(expected), rank
            first += len(expected)

    def test_deviations_are_cut_as_their_parameter(self, num_rows, world_size):
        deviations = torch.randn(2, num_rows, 3)

        def shard(mesh: DeviceMesh) -> torch.Tensor:
            parameter = empty_parameter((num_rows, 3), mesh)
            part = local(shard_like(deviations, parameter, dim=1))
            assert part.shape == (2, *local(parameter).shape)
            return part

        assert torch.equal(torch.cat(on_each_rank(world_size, shard), dim=1), deviations)

    def test_a_whole_tensor_is_copied_into_shards(self, num_rows, world_size):
        source = torch.randn(num_rows, 3)

        def copied(mesh: DeviceMesh) -> torch.Tensor:
            target = empty_parameter((num_rows, 3), mesh)
            copy_whole_(target, source)
            return local(target)

        assert torch.equal(torch.cat(on_each_rank(world_size, copied)), source)


@pytest.mark.parametrize("shape", [(5, 3), (1300, 600), (7, BLOCK_SIZE + 1)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_noise_does_not_depend_on_the_sharding(shape, world_size):
    def noise_of(tensor: torch.Tensor) -> torch.Tensor:
        for block in blocks_of({"w": tensor}):
            draw_sample({"w": tensor}, {"w": tensor}, block, torch.tensor(0.5), key=(1, 2))
        return local(tensor)

    shards = on_each_rank(world_size, lambda mesh: noise_of(empty_parameter(shape, mesh)))
    assert torch.equal(torch.cat(shards), noise_of(torch.zeros(shape)))


class TestRefusals:
    def test_some_parameters_whole_and_some_not(self):
        with playing(0, 2) as mesh:
            parameters = {"a": empty_parameter((4, 2), mesh), "b": torch.zeros(3)}
            with pytest.raises(ValueError, match=r"'b' is whole on each process while others are sharded"):
                check_sharding(parameters)

    @pytest.mark.parametrize("placement", [Shard(1), Replicate()])
    def test_shards_that_are_not_rows(self, placement):
        with playing(0, 2) as mesh:
            tensor = torch.distributed.tensor.zeros(4, 2, device_mesh=mesh, placements=[placement])
            with pytest.raises(ValueError, match=r"'a' is sharded as .*, which is not supported.*DistributedConfig"):
                check_sharding({"a": tensor})

    def test_replicas_of_shards(self):
        with playing(0, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            tensor = torch.distributed.tensor.zeros(4, 2, device_mesh=mesh, placements=[Replicate(), Shard(0)])
            with pytest.raises(ValueError, match=r"'a' is sharded as .*, which is not supported"):
                check_sharding({"a": tensor})

    def test_a_model_that_trainer_would_wrap(self, make_trainer, sharded_model):
        sharded_model._is_distributed_loading_by_transformers = False
        with pytest.raises(ValueError, match=r"model: it is sharded in a way that .* `from_pretrained"):
            make_trainer(model=sharded_model)

    def test_the_baseline(self, sharded_model, tmp_path):
        config = MAPConfig(str(tmp_path), alpha_over_n=0.1, beta_over_n=0.1, use_cpu=True, save_strategy="no")
        with pytest.raises(ValueError, match="the baseline does not support"):
            MAPTrainer(sharded_model, config, train_dataset=make_dataset("vit"))

    @pytest.mark.skipif(not TRAINER_KNOWS_SHARDS, reason="Trainer knows sharded models since transformers 5.19")
    def test_pushes_in_training(self, sharded_model, make_config, monkeypatch):
        monkeypatch.setattr(DEELBoTrainer, "init_hf_repo", lambda self: None)
        config = make_config(push_to_hub=True, hub_strategy="every_save")
        with pytest.raises(ValueError, match=r'hub_strategy: must be "end" for a sharded model.*every_save'):
            DEELBoTrainer(sharded_model, config, train_dataset=make_dataset("vit"))

    def test_a_copy_of_a_sample(self, sharded_model):
        posterior = GaussianPosterior(sharded_model, ["classifier.weight", "classifier.bias"], num_examples=24)
        with pytest.raises(ValueError, match="sample_model: a sharded model cannot be copied"):
            posterior.sample_model(0)


@pytest.fixture
def sharded_model() -> Iterator[nn.Module]:
    """As `from_pretrained` leaves it, on one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = make_model("vit")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model._is_distributed_loading_by_transformers = True
        yield model
    finally:
        dist.destroy_process_group()


def test_what_a_sharded_model_is(sharded_model):
    parameters = dict(sharded_model.named_parameters())
    assert mesh_of(parameters) is not None
    assert is_first_process(parameters)
    assert class_of(sharded_model) is class_of(make_model("vit")) is type(make_model("vit"))
    posterior = GaussianPosterior(sharded_model, ["classifier.weight", "classifier.bias"], num_examples=24)
    assert repr(posterior).startswith("GaussianPosterior(ViTForImageClassification, D=")


def test_one_process_writes():
    assert on_each_rank(3, lambda mesh: is_first_process({"w": empty_parameter((2,), mesh)})) == [True, False, False]
