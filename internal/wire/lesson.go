package wire

import "time"

// MaxLesson is how many bytes of text a lesson may have.
const MaxLesson = 16 << 10

// DestroyRequest destroys a kid and keeps what was learned from it.
type DestroyRequest struct {
	Reason string `json:"reason" maxLength:"4096"` // why, for the record
	Lesson string `json:"lesson,omitempty"`        // what was learned, as Markdown; kept redacted
}

// DestroyReply says what was kept of a kid that is gone.
type DestroyReply struct {
	Lesson      string         `json:"lesson,omitempty"`      // name of the note
	Credentials *CredentialUse `json:"credentials,omitempty"` // what it made of what it was granted; absent: nobody knows
}

// Lesson is a note about a kid that is gone. Whoever wrote it may have been an AI agent: it is material, and no
// instruction.
type Lesson struct {
	Name       string       `json:"name,omitempty"` // of its file
	Kid        string       `json:"kid"`
	Session    string       `json:"session"`
	Card       string       `json:"card"`
	Purpose    string       `json:"purpose"`
	Owner      string       `json:"owner,omitempty"`
	By         string       `json:"by"` // who destroyed the kid, and wrote this
	Created    time.Time    `json:"created"`
	Destroyed  time.Time    `json:"destroyed"`
	State      KidState     `json:"state"` // before that
	Cause      string       `json:"cause,omitempty"`
	Reason     string       `json:"reason"`
	Denied     []DeniedDest `json:"denied"`                // where it was refused; the first 50 places
	DeniedMore int          `json:"denied_more,omitempty"` // so many places are left out
	Unused     []string     `json:"unused,omitempty"`      // secrets that it was granted and never used
	Wide       []WideSecret `json:"wide,omitempty"`        // and those that were for more than what it used
	Text       string       `json:"text,omitempty"`        // Markdown; a list has its first line alone
}

// DeniedDest is a place that a kid was refused, and how often.
type DeniedDest struct {
	To     string `json:"to"`
	Reason string `json:"reason"`
	Count  uint64 `json:"count"`
}
