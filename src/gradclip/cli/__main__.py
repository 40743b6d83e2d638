"""`python -m gradclip.cli`: the command line, in whatever environment this Python is."""

from . import main

main()
