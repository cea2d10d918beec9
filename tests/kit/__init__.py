"""What tests share: helpers, references in float64, sweeps and random programs. No test is imported from
another one; what two of them need is here."""
