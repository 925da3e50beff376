package wire

import "time"

// ExecRequest runs a command in a kid: Argv, or Shell as a line for /bin/sh. Stdin is its input, or the beginning of it
// where Input says that more follows: from whoever started it, or of a detached command from whoever attaches to it.
// Without either it is empty.
type ExecRequest struct {
	Argv    []string          `json:"argv,omitempty"`
	Shell   string            `json:"shell,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Dir     string            `json:"dir,omitempty"` // default /workspace
	Stdin   []byte            `json:"stdin,omitempty"`
	Input   bool              `json:"input,omitempty"`      // more input follows: over a WebSocket alone, unless it is detached
	Timeout time.Duration     `json:"timeout_ns,omitempty"` // 0: none
	TTY     *TermSize         `json:"tty,omitempty"`        // it gets a terminal, and all its output is stdout
	Detach  bool              `json:"detach,omitempty"`     // the answer is its id; it runs on, and its output is kept
}

// TermSize is the size of a terminal, in characters.
type TermSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// ExecProtocol is the WebSocket sub-protocol that carries a command's input and output: text messages, each of them one
// JSON document. The caller sends an ExecRequest first, where it starts the command, and then ExecInput; back come
// ExecFrame. The number changes with anything that an older end would misunderstand.
const ExecProtocol = "tagout.exec.v1"

// Bounds of ExecProtocol. A caller that goes beyond them is left.
const (
	ExecWindow   = 256 << 10 // bytes of input that were sent and are not in an ExecFrame's Taken yet
	ExecMaxPiece = 64 << 10  // bytes of input in one message
)

// ExecInput is what a caller goes on sending. Exactly one of the fields is set. Resize and Detach count at once, whatever
// of the input still waits.
type ExecInput struct {
	Stdin  []byte    `json:"stdin,omitempty"`
	EOF    bool      `json:"eof,omitempty"` // the input ends
	Resize *TermSize `json:"resize,omitempty"`
	Detach bool      `json:"detach,omitempty"` // let it run on without this caller
}

// ExecFrame is one line of an exec's stream: output bytes, or the end. The first has the command's id alone. Taken and
// Problem come over a WebSocket alone.
type ExecFrame struct {
	ID     string    `json:"id,omitempty"`
	Stdout []byte    `json:"stdout,omitempty"` // base64, whatever the bytes are
	Stderr []byte    `json:"stderr,omitempty"`
	Lost   int64     `json:"lost,omitempty"`  // so many bytes of a detached command's output are not kept; what follows, follows them
	Taken  int       `json:"taken,omitempty"` // so many more bytes of the input have left the window
	Exit   *ExecExit `json:"exit,omitempty"`
	// Problem says why nothing was started, or why this caller is left; it is the last frame.
	Problem *Problem `json:"problem,omitempty"`
}

// LogFrame is one line of what is kept of the output of a kid's commands. The first of each command has Exec; those of
// different commands come mixed where they are followed.
type LogFrame struct {
	ID     string    `json:"id"` // the command's
	Exec   *Exec     `json:"exec,omitempty"`
	Stdout []byte    `json:"stdout,omitempty"` // base64, whatever the bytes are
	Stderr []byte    `json:"stderr,omitempty"`
	Lost   int64     `json:"lost,omitempty"` // so many bytes are not kept; what follows, follows them
	Exit   *ExecExit `json:"exit,omitempty"` // the command's last
}

// ExecExit is how an exec ended. Result is one of exited, signaled, timeout, stopped (its kid was), oom (its kid ran out
// of memory), killed (somebody ended it), failed, unknown (nobody can say how it ended, and Code is -1).
type ExecExit struct {
	Result string     `json:"result"`
	Code   int        `json:"code"`
	Signal string     `json:"signal,omitempty"`
	Detail string     `json:"detail,omitempty"`
	Cut    bool       `json:"cut,omitempty"` // what it left running still holds its output: more may come, and nobody reads it
	Usage  *ExecUsage `json:"usage,omitempty"`
}

// ExecUsage is what the command and all that it started had used by its end.
type ExecUsage struct {
	User   time.Duration `json:"user_ns"`
	System time.Duration `json:"system_ns"`
	MaxRSS int64         `json:"max_rss"` // bytes, of its largest process; 0: not known
}

// Exec is a command that runs in a kid, or has ended and was detached.
type Exec struct {
	ID       string    `json:"id"`
	Argv     []string  `json:"argv"` // cut after 64 words and 512 bytes
	Actor    string    `json:"actor"`
	Started  time.Time `json:"started"`
	Detached bool      `json:"detached,omitempty"`
	TTY      bool      `json:"tty,omitempty"`
	Exit     *ExecExit `json:"exit,omitempty"` // nil: it runs
	Ended    time.Time `json:"ended,omitzero"`
	Adopted  time.Time `json:"adopted,omitzero"`   // when a sandboxd that was restarted took it over
	Outlives bool      `json:"outlives,omitempty"` // it runs on when sandboxd is restarted or killed now
}
