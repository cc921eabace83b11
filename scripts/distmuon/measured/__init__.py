"""Part III: the job, the contenders, and everything that counts, weighs, traces and times them."""
