"""HiFT, SFT and TokenTune on several ranks. DDP, FSDP2 and ZeRO-1, 2 and 3 have one folder each."""
