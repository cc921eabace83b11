"""What chapter 18 alone needs: machines that die, what is seen of it, and how the training goes on."""
