"""Entry point of `python -m steercap.lab.demo`."""

from steercap.lab.demo.demonstration import main

if __name__ == "__main__":
    main()
