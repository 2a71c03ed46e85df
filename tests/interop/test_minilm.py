"""The MiniLM that the tests compute in NumPy is the one that transformers computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from minilm import SENTENCES, embeddings, file, tokens
from safetensors.numpy import load_file
from transformers import AutoModel, AutoTokenizer

pytestmark = pytest.mark.interop


def test_the_numpy_model_equals_transformers() -> None:
    folder = file("config.json").parent
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for sentence in SENTENCES:
        inputs = tokenizer(sentence, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == tokens(sentence)
        with torch.no_grad():
            mean = model(**inputs).last_hidden_state[0].mean(dim=0)
        expected.append((mean / mean.norm()).numpy())
    found = embeddings(load_file(file("model.safetensors")))
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=1e-5)
    assert found.dtype == np.float32
