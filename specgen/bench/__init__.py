"""Does it pay, and at which k?"""
