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
