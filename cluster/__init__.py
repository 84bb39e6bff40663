"""The ranks and machines of a job: burn-in, launches, members, and which rank is stuck or lost."""
