"""Ready-made YAML files for `dspark fit --config`; a package so that importlib.resources finds them."""
