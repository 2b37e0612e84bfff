"""`python -m diesel_kubernetes.operator`."""

from .main import main

if __name__ == "__main__":
    main()
