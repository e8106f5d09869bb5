"""Side-by-side with a PyTorch loop, growth with the number of clients, throughput."""
