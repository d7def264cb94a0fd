"""`python -m bindery`."""

from bindery.main import main

if __name__ == "__main__":
    main()
