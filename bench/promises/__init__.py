"""What tiers are promised and whether it is kept: loads, runs in virtual time and against real processes, judgement."""
