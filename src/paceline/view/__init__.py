"""What a person sees of a run. Every view reads events and results, nothing else.

    progress   a run while it goes on, in the terminal
    beside     the same in lines, where others write to the terminal too
    table      one result, or several side by side, in the terminal
    report     one HTML file about one or several runs

Import the view itself: a command pays only for the one it shows.
"""
