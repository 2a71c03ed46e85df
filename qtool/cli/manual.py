"""What `qtool --help` says beside commands and options."""

from __future__ import annotations

SECTIONS = {
    "Exit codes": """\b
0    done, also where the reader of a pipe has gone away
1    cannot be done; one line says what, why, and what to do
2    wrong usage
3    a gate, or --strict, has failed; the target is as it was
130  interrupted (129: hung up, 143: terminated)

Of several sources the worst counts: 1 before 2 before 3.""",
    "Gates": """\b
--fail-if EXPR names what must not be: figures of the report and numbers with
< <= > >= == != between them, joined by and, or and not, with + - * / and
parentheses. Units are %, dB, and B to TB. A figure is that of each tensor, or
with total. before it of all together. `FIGURE worse by N`, or N%, is about
--baseline; `on PATTERN, PATTERN` at the end chooses tensors. A figure that is
null passes where the tensor is exact or empty, and fails where NaN is why.

\b
both    elements, nan_count, inf_count, zero_count, clipped, clipped_low,
        clipped_high, clipped_fraction, flushed_to_zero, min, max, absmax,
        mse, rmse, mean_error, max_abs_error, sqnr_db, cosine_similarity,
        relative_error, weighted_mse, weighted_relative_error,
        weighted_sqnr_db, output_error, output_error_nearest, bytes_before,
        bytes_after, bits_per_weight_before, bits_per_weight
tensor  axis, block_size, num_scales, scale_min, scale_max, global_scale
total.  tensors, skipped, second_order, outputs_relative_error,
        outputs_max_abs_error, outputs_cosine_similarity,
        outputs_argmax_agreement, file_bytes_before, file_bytes_after""",
    "Environment": """\b
QTOOL_COMMAND_OPTION  the option of a command, as its --help says: a flag is
                      1 or 0, a repeatable option has one value in each
                      line, and an empty variable is none
QTOOL_CONFIG          the file with the configuration
NO_COLOR, FORCE_COLOR, COLUMNS, TERM, TMPDIR
                      as everywhere""",
    "Configuration": """\b
The nearest of qtool.toml and pyproject.toml, with a table [tool.qtool], in
the current folder or one above it gives options that neither the command
line nor the environment gives:

\b
  quiet = true                # for every command that has --quiet
  [quantize]                  # [tool.qtool.quantize] in pyproject.toml
  block-size = 32
  include = ["*.mlp.*"]

Names of files in it are relative to its folder; lists replace lists. What
--recipe names comes after all of these.""",
    "Files": """\b
Results go to standard output or to files that appear whole or not at all;
tables and messages to standard error. - is standard input or output.""",
}
