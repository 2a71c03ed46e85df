"""How a quantized weight is spelled for a reader."""
