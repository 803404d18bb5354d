"""What tests share: exact stand-ins, tiny models, stored results, the command as a process."""
