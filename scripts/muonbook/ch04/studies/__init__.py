"""Studies beside the race, all on the language, from the settings that the race tuned."""
