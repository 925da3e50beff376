"""Opens connections from inside a kid and holds them: python3 fill.py HOST PORT COUNT SAY.

SAY is hexadecimal and sent on each. The file "filled" appears when all are open, as far as the kernel is concerned; the
file "enough" ends it."""
import os, socket, sys, time

host, port, count, say = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
held = []
for _ in range(count):
    held.append(socket.create_connection((host, port), 20))
    held[-1].sendall(say)
open("filled", "w").close()
while not os.path.exists("enough"):
    time.sleep(0.02)  # a look at a condition
