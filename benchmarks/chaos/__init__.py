"""Real systems under fire: requests whose answers are known beforehand, processes to hit, and judges of what came."""
