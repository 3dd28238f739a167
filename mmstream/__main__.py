"""``python -m mmstream``: the command line."""

from mmstream.cli import main

if __name__ == "__main__":
    main()
