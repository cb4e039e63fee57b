"""Model families: a config.json into layers."""
