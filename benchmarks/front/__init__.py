"""What does the front of a group add to TTFT and ITL, and what does it cost a token?"""
