"""``python -m sparse_pcg``."""

from .cli import main

main()
