"""`python -m diesel_kubernetes.csi`."""

from .main import main

if __name__ == "__main__":
    main()
