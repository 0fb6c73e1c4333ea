"""The version of the package. Written here and nowhere else."""

__version__ = "0.1.0"
