"""What a person runs: commands, plans, conversions, reports, fault campaigns and audits. No rank
imports this package."""
