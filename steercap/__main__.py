"""`python -m steercap`: the command `steercap`."""

from steercap.cli import main

if __name__ == "__main__":
    main()
