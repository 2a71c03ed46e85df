"""Tiny Llama models, saved as transformers saves them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LAYERS = 2
HIDDEN = 256
HEADS = 4
SHARD = "1600KB"  # two shards, between the parts of a matrix that runtimes fuse
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


@dataclass(frozen=True)
class Llama:
    """A Llama of random bfloat16 weights, its name and the sizes that differ."""

    name: str
    intermediate: int = 512
    key_value_heads: int = 2
    vocabulary: int = 384
    tied: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Shapes (out, in) of the matrices inside the layers, by module name."""
        key_value = self.key_value_heads * HIDDEN // HEADS
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (key_value, HIDDEN),
            "self_attn.v_proj": (key_value, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (self.intermediate, HIDDEN),
            "mlp.up_proj": (self.intermediate, HIDDEN),
            "mlp.down_proj": (HIDDEN, self.intermediate),
        }
        return {f"model.layers.{i}.{n}": s for i in range(LAYERS) for n, s in shapes.items()}

    @property
    def vocabulary_matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of the embedding and, where it is a tensor of its own, of lm_head."""
        names = ["model.embed_tokens"] + ([] if self.tied else ["lm_head"])
        return dict.fromkeys(names, (self.vocabulary, HIDDEN))

    def save(self, folder: Path) -> None:
        """Write the folder. Some rows and blocks are zero, some values stand out."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(len(self.name))
        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=self.intermediate,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=self.key_value_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        with torch.no_grad():
            for i, name in enumerate(self.linears):
                weight = model.get_submodule(name).weight
                weight *= 4 ** (i % 7 % 3)  # the parts of a fused matrix have different ranges
                weight[1] = 0
                weight[2, :128] = 0
                weight[3, 5] = -16 * weight.abs().max()
        model.save_pretrained(folder, max_shard_size=SHARD)


EVEN = Llama("even")
RAGGED = Llama("ragged", intermediate=340, key_value_heads=1, vocabulary=383)
TIED = Llama("tied", tied=True)
