"""DSpark speculative-decoding drafters, trained with PyTorch Lightning."""

from pathlib import Path

# In a source checkout callbacks/, datamodules/ and configs/ lie beside this package; installed, they lie inside it.
if not (Path(__file__).parent / "callbacks").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"
