"""Output for people and programs: tables, plans and summaries."""
