"""Where things run: settings, adapters, the local stack."""
