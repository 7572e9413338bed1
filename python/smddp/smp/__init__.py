"""Rules of the SMP configuration without torch: keys of SMP v2, layout arithmetic, and launcher parameters."""
