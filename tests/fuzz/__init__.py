"""Bytes of a hostile producer: `make fuzz SECONDS=600`.

`promises` says what must hold of any bytes; Hypothesis draws them in `tests/integration`, and
`__main__` lets atheris look for those that reach new lines of the reader.
"""
