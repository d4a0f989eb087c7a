"""Every member of the policy's swap points is reached from the command line by its bare name."""

from itertools import zip_longest

import pytest

from ssgrpo_lightning.cli import SSGRPOCLI, main
from ssgrpo_lightning.losses import (
    AdaptiveBeta,
    BetaControl,
    Correction,
    DrGrpo,
    KlEstimator,
    KlTerm,
    OffPolicyMask,
    Reduction,
    Surrogate,
)
from ssgrpo_lightning.references import Reference
from tests.conftest import QUICKSTART, small
from tests.contracts.test_contracts import members

NEEDS = {DrGrpo: "max_tokens: 40", AdaptiveBeta: "target: 0.01"}
TABLE = {
    "surrogate": members(Surrogate),
    "reduction": members(Reduction),
    "correction": members(Correction),
    "kl": [(term, estimator) for term in members(KlTerm) for estimator in members(KlEstimator)],
    "beta_control": members(BetaControl),
    "reference": [r for r in members(Reference) if r.__name__ != "AdapterOff"],
}
# One command for the first of each, one for the second, …; the first again where there is no more.
ROWS = [
    {name: found or TABLE[name][0] for name, found in zip(TABLE, row, strict=True)}
    for row in zip_longest(*TABLE.values())
]


@pytest.mark.filterwarnings("ignore:.*(gradient is 0 on average|spreads over a rollout)")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["surrogate"].__name__)
def test_member_is_reached_from_yaml(row, tmp_path, monkeypatch):
    monkeypatch.setattr(SSGRPOCLI, "_run_subcommand", lambda self, subcommand: None)
    chosen = []
    for name, member in row.items():
        needs = f", init_args: {{{NEEDS[member]}}}" if member in NEEDS else ""
        if name == "kl":
            member, estimator = member
            needs = f", init_args: {{estimator: {estimator.__name__}}}"
        chosen.append(f"--model.policy.{name}={{class_path: {member.__name__}{needs}}}")
    beta = ["--model.policy.beta=0.1"]
    policy = main(["fit", f"--config={QUICKSTART}", *small(tmp_path), *beta, *chosen]).model.policy
    found = {
        "surrogate": policy.surrogate,
        "reduction": policy.reduction,
        "correction": policy.correction,
        "kl": policy.anchor.kl,
        "beta_control": policy.anchor.control,
        "reference": policy.anchor.reference,
    }
    for name, member in row.items():
        of = member[0] if name == "kl" else member
        assert type(found[name]) is of
    assert type(found["kl"].estimator) is row["kl"][1]


def test_members_nest_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(SSGRPOCLI, "_run_subcommand", lambda self, subcommand: None)
    inner = "{class_path: GspoToken, init_args: {clip_low: 0.01}}"
    nested = f"{{class_path: OffPolicyMask, init_args: {{surrogate: {inner}}}}}"
    arguments = [f"--model.policy.surrogate={nested}"]
    policy = main(["fit", f"--config={QUICKSTART}", *small(tmp_path), *arguments]).model.policy
    assert isinstance(policy.surrogate, OffPolicyMask)
    assert policy.surrogate.surrogate.clip_low == 0.01
