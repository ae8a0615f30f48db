"""Who runs when: Prefect flows and the command."""
