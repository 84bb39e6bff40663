"""The ranks and machines of a job: detection of ranks that are stuck, slow or lost."""
