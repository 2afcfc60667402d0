"""What the two entry points share: settings, jobs, tracking, provenance and sweeps."""
