"""What chapter 17 measures by the clock: the step, saving, watching."""
