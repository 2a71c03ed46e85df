"""Which tensors share a global scale, by their names."""

from __future__ import annotations

import pytest

from qtool.jobs.fusing import fused, fused_across, shared

QKV = [f"m.0.self_attn.{name}_proj.weight" for name in "qkv"]
MLP = ["m.0.mlp.gate_proj.weight", "m.0.mlp.up_proj.weight"]
TOGETHER = [
    pytest.param(QKV, id="qkv"),
    pytest.param(MLP, id="gate-up"),
    pytest.param([f"e.attention.self.{n}.weight" for n in ("query", "key", "value")], id="bert"),
    pytest.param(["m.a.q_a_proj.weight", "m.a.kv_a_proj_with_mqa.weight"], id="latent-attention"),
    pytest.param(["m.experts.7.w1.weight", "m.experts.7.w3.weight"], id="experts"),
    pytest.param(["q_proj.weight", "v_proj.weight"], id="without-a-prefix"),
]
APART = [
    "m.1.self_attn.q_proj.weight", "m.0.mlp.down_proj.weight", "m.experts.8.w1.weight",
    "m.experts.7.w2.weight", "m.0.self_attn.q_proj.bias", "m.0.self_attn.xq_proj.weight",
    "lm_head.weight", "m.0.self_attn.o_proj.weight",
]  # fmt: skip


@pytest.mark.parametrize("names", TOGETHER)
def test_what_runtimes_load_as_one_matrix_is_fused(names: list[str]) -> None:
    assert sorted(fused([*APART, *names])) == sorted(names)
    assert sorted(fused([*reversed(names), *APART])) == sorted(names)
    assert fused([*names[:1], *APART]) == []


def test_a_group_has_the_largest_magnitude_of_its_members() -> None:
    absmax = {QKV[0]: 1.0, QKV[1]: 3.0, QKV[2]: 0.5, MLP[0]: 0.0, MLP[1]: 2.0}
    assert shared(absmax) == dict.fromkeys(QKV, 3.0) | dict.fromkeys(MLP, 2.0)
    assert shared({}) == {}


def test_what_lies_in_one_file_is_not_fused_across_files() -> None:
    files = dict.fromkeys(QKV, "a") | {MLP[0]: "a", MLP[1]: "b"} | dict.fromkeys(APART, "b")
    assert sorted(fused_across(files)) == sorted(MLP)
    assert sorted(fused_across(files | {QKV[1]: "b"})) == sorted([*MLP, *QKV])
