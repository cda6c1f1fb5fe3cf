"""`python -m fdasync`: the `fdasync` command, where its script is not on the path."""

from fdasync_command import main

if __name__ == "__main__":
    main()
