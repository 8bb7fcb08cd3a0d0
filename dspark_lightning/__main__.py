"""`python -m dspark_lightning` is the `dspark` command."""

from dspark_lightning.cli import main

if __name__ == "__main__":
    main()
