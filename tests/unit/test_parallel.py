"""What can be said of ranks on one: shares, refusals, sums of ranks that know other names."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from ssgrpo_lightning.parallel import FSDP2, Tally, even_shares, refuse_unsupported, updates


def loads(work, owner, ranks):
    return [sum(w for w, o in zip(work, owner) if o == rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_of_uneven_lengths_are_more_even_than_they_came(ranks):
    generator = torch.Generator().manual_seed(ranks)
    lengths = (torch.rand(8 * ranks, generator=generator) * 3).exp() * 50  # 50 to 1,000 tokens
    work = lengths.tolist()
    as_they_came = [i // 8 for i in range(8 * ranks)]
    owner = even_shares(work, ranks)
    before, after = (max(loads(work, o, ranks)) for o in (as_they_came, owner))
    mean = sum(work) / ranks
    assert before > 1.1 * mean
    assert after < 1.05 * mean
    assert sorted(owner) != owner and set(owner) == set(range(ranks))


def test_no_rank_is_left_without_a_piece_even_of_no_work():
    assert sorted(even_shares([7.0, 0.0, 0.0, 0.0], 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DDPStrategy", {}, "alternate: use ddp_find_unused_parameters_true"),
        ("DDPStrategy", {"find_unused_parameters": True, "static_graph": True}, "leave static_"),
        ("FSDPStrategy", {}, "FSDPStrategy, whose first version .*: use fsdp2"),
        ("DeepSpeedStrategy", {}, "DeepSpeedStrategy, which owns one optimiser.*: use fsdp2"),
        ("XLAStrategy", {}, "XLAStrategy, which was never tried .*: use fsdp2"),
    ],
)
def test_what_cannot_be_kept_right_is_refused_with_the_way_out(name, options, message):
    kind = type(name, (DDPStrategy,), {})
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(kind(**options))


def test_tensor_parallel_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, must be 1: the chunked"):
        FSDP2(tensor_parallel_size=2)


def test_a_rank_that_only_made_idle_passes_knows_fewer_names(monkeypatch):
    tally = Tally()
    tally.add({"loss": torch.tensor(0.0), "steps": torch.tensor(1.0)})
    other = {"loss": 3.0, "steps": 1.0, "tokens": 4.0, "kl": 2.0, "ratio/max": 1.5}
    monkeypatch.setattr(updates, "objects", lambda _, own: [own, other])
    means = tally.means(L.LightningModule(), "tokens")
    assert {n: float(x) for n, x in means.items()} == {
        "loss": 3.0,
        "steps": 0.25,
        "tokens": 1.0,
        "kl": 0.5,
        "ratio/max": 1.5,
    }
