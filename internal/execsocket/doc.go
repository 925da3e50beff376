// Package execsocket carries one command's input and output over a WebSocket: both ends of wire.ExecProtocol.
//
// It promises that what a caller sends is bounded and never in the way: input beyond the window is refused and not
// queued, so that a new terminal size, a wish to leave and the end of the connection count at once, whatever the command
// has not read yet. Output waits for its reader, and the command with it. Who may call is its user's business.
package execsocket
