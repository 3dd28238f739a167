"""``python -m mmstream`` runs the command line, as the ``mmstream`` script does."""

from mmstream.cli import main

if __name__ == "__main__":
    main()
