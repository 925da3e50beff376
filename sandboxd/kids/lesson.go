package kids

import (
	"context"
	"errors"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/lessons"
)

// DestroyWithLesson keeps a note of what was learned from the kid, and then destroys it. It returns the note's name. A
// lesson that cannot be kept is an error, and then the kid is as it was: Destroy needs none. When the destroy fails, or
// is never got to, the note is there already, and whoever asks again gets the same one.
func (m *Manager) DestroyWithLesson(ctx context.Context, name, actor, why, text string) (string, error) {
	if err := needWhy(name, why); err != nil {
		return "", err
	}
	m.mu.Lock()
	k := m.kids[name]
	if k == nil || wire.IsProofKid(name) {
		m.mu.Unlock()
		return "", notFound(name) // and nothing is kept of it
	}
	view := k.view()
	var secrets []string
	if view.State != wire.KidSpawning { // until then it has none that anybody knows
		for _, token := range k.rec.Tokens {
			secrets = append(secrets, token)
		}
	}
	m.mu.Unlock()
	file, err := m.keepLesson(view, m.CredentialUse(ctx, name), actor, why, text, secrets)
	if err != nil {
		return "", err
	}
	m.log(k, audit.Record{Event: audit.EventLessonKept, Actor: actor, Outcome: audit.OutcomeOK, Fields: map[string]string{"file": file}})
	if err := m.injected("lesson", true); err != nil {
		return file, err
	}
	return file, m.destroy(ctx, k, actor, why)
}

func (m *Manager) keepLesson(k wire.Kid, use *wire.CredentialUse, actor, why, text string, secrets []string) (string, error) {
	if m.cfg.Lessons == nil {
		return "", refuse(Unavailable, reason.Internal, "lessons are not kept here")
	}
	if use == nil {
		use = &wire.CredentialUse{}
	}
	file, err := m.cfg.Lessons.Keep(wire.Lesson{
		Unused: use.Unused, Wide: use.Wide,
		Kid: k.Name, Session: k.Session, Card: k.Card, Purpose: k.Purpose, Owner: k.Owner, By: actor, Created: k.Created,
		Destroyed: time.Now(), State: k.State, Cause: k.Cause, Reason: why, Text: text,
	}, secrets)
	const so = "keeping a lesson of kid %s, which was not destroyed: %w"
	switch {
	case errors.Is(err, lessons.ErrInvalid):
		return "", refuse(Invalid, reason.Malformed, so, k.Name, err)
	case errors.Is(err, lessons.ErrFull):
		return "", refuse(Capacity, reason.Capacity, so, k.Name, err)
	case err != nil:
		return "", refuse(Internal, reason.Internal, so, k.Name, err)
	}
	return file, nil
}
