"""From what is there to what should be: decisions are pure functions, and one module each asks and writes."""
