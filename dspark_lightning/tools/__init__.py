"""The commands beside LightningCLI's, one in each file."""
