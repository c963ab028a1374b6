import os
import re
import shutil
import signal
import subprocess
import time
import types

import numpy as np
import pandas as pd
import pytest
import reference
import tensorflow.compat.v1 as tf
from conftest import (
  PROCESS_SECONDS,
  assert_readable,
  call,
  clean_error,
  command,
  environment,
  logits_of,
  mistake,
  random_records,
  run_script,
)
from PIL import Image

import network
import val
from data_input import CLASSES


@pytest.fixture(scope='module')
def test_set(tmp_path_factory):
  """A folder whose test_batch.bin holds 37 records; their labels and images."""
  folder = tmp_path_factory.mktemp('37 records')
  return (folder,) + random_records(folder / 'test_batch.bin', 37, seed=4)


def numbers(stdout):
  """Right ones, records and cross-entropy of a report."""
  accuracy = re.search(r'accuracy (\d+) / (\d+) = ', stdout)
  return int(accuracy.group(1)), int(accuracy.group(2)), float(re.search(r'cross-entropy (\S+)', stdout).group(1))


def confusion_of(stdout):
  """The confusion matrix of a report."""
  rows = stdout.split('confusion matrix')[1].splitlines()[2:12]
  assert [row.split()[0] for row in rows] == CLASSES
  return [[int(word) for word in row.split()[1:]] for row in rows]


def test_score_by_numbers():
  logits = np.array([[0, 0, 1000], [1, 3, 2], [0, 0, 0]], np.float32)
  result = val.score(np.array([2, 2, 1]), logits)
  assert (result['correct'], result['total'], result['accuracy']) == (1, 3, 1 / 3)
  assert result['cross_entropy'] == pytest.approx((0 + np.log(np.exp([-1, 1, 0]).sum()) + np.log(3)) / 3, rel=1e-6)
  assert result['confusion'].tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1]]


def files_of(folder):
  """{name: bytes} of the checkpoint files in a folder."""
  return {name: open(os.path.join(folder, name), 'rb').read() for name in os.listdir(folder) if 'model' in name}


def test_the_report_agrees_with_numpy_for_any_batch_size(test_set, wide_awake_copy, capsys):
  folder, labels, images = test_set
  logits = logits_of(wide_awake_copy, images)
  predicted = logits.argmax(1)
  assert len(set(predicted)) >= 3  # or the comparison would be of one class only
  confusion = pd.crosstab(labels, predicted).reindex(range(10), columns=range(10), fill_value=0).values.tolist()
  before = files_of(wide_awake_copy)

  done = run_script('val.py', '--checkpoint_dir', wide_awake_copy, '--data_dir', folder, '--batch_size', 8)
  assert_readable(done.stderr)
  cross_entropy = reference.cross_entropy(logits, labels)
  assert numbers(done.stdout) == ((predicted == labels).sum(), 37, pytest.approx(cross_entropy, abs=1e-4))
  assert confusion_of(done.stdout) == confusion
  call(val, wide_awake_copy, '--data_dir', folder, '--batch_size', 100, '--num_threads', 4)
  assert capsys.readouterr().out == done.stdout
  assert files_of(wide_awake_copy) == before


def test_the_same_is_written_for_tensorboard(test_set, wide_awake_copy, capsys):
  call(val, os.path.join(wide_awake_copy, 'model.ckpt-7'), '--data_dir', test_set[0])
  stdout = capsys.readouterr().out
  correct, total, cross_entropy = numbers(stdout)
  (path,) = os.listdir(os.path.join(wide_awake_copy, 'eval'))
  values = {}
  for event in tf.train.summary_iterator(os.path.join(wide_awake_copy, 'eval', path)):
    for value in event.summary.value:
      assert event.step == 7
      values[value.tag] = value
  assert values['accuracy'].simple_value == pytest.approx(correct / total)
  assert values['cross_entropy'].simple_value == pytest.approx(cross_entropy, abs=1e-4)
  of_class = [values['class_accuracy/' + name].simple_value for name in CLASSES]
  confusion = np.array(confusion_of(stdout))
  np.testing.assert_allclose(of_class, confusion.diagonal() / confusion.sum(1), rtol=1e-6)
  text = tf.make_ndarray(values['confusion_matrix'].tensor)[0].decode()
  assert [[int(n) for n in row.split('|')[1:]] for row in text.splitlines()[2:]] == confusion.tolist()


def test_a_class_without_records_has_an_accuracy_of_zero():
  table = val.class_table(np.diag([3] * 9 + [0]))
  assert table['accuracy'].tolist() == [1] * 9 + [0] and table['records'].sum() == 27


@pytest.fixture
def three_checkpoints(wide_awake, tmp_path):
  """A folder of steps 7, 8 and 20: of one network, of it with shifted logits, and of it again."""
  folder = shutil.copytree(wide_awake, str(tmp_path / 'three'), ignore=shutil.ignore_patterns('eval', 'checkpoint'))
  with tf.Graph().as_default(), tf.Session() as session:
    network.evaluation_network(tf.placeholder(tf.float32, [None, 28, 28, 3]), 10)
    saver = tf.train.Saver(max_to_keep=9)
    network.restore(session, tf.trainable_variables(), folder)
    saver.save(session, os.path.join(folder, 'model.ckpt'), 20, write_meta_graph=False)
    biases = [variable for variable in tf.trainable_variables() if variable.op.name == 'fc8/biases'][0]
    biases.load(np.eye(10)[4] * 1e4, session)
    saver.save(session, os.path.join(folder, 'model.ckpt'), 8, write_meta_graph=False)
  return folder


def test_all_ranks_every_checkpoint_and_names_the_best(test_set, three_checkpoints, capsys):
  call(val, '--all', '--checkpoint_dir', three_checkpoints, '--data_dir', test_set[0])
  stdout = capsys.readouterr().out
  assert len(re.findall(r'^accuracy ', stdout, re.M)) == 3
  rows = [line.split() for line in stdout[stdout.rindex('checkpoint accuracy') :].splitlines()[1:-1]]
  found = {int(row[0].rsplit('-', 1)[1]): row[1:] for row in rows}
  assert sorted(found) == [7, 8, 20] and found[7] == found[20] != found[8]
  # Step 8 always says deer: 4 of 37.
  assert found[8][0] == '10.81%'
  accuracies = [float(row[1][:-1]) for row in rows]
  assert accuracies == sorted(accuracies, reverse=True)
  assert stdout.splitlines()[-1] == 'best: ' + rows[0][0]


def test_watch_validates_each_new_checkpoint_once_until_training_is_done(test_set, three_checkpoints, tmp_path):
  # As a cluster's evaluator, which runs val.py --watch.
  folder, out = tmp_path / 'watched', tmp_path / 'out'
  evaluator = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'
  with open(str(out), 'w') as f:
    process = subprocess.Popen(command('train.py', '--checkpoint_dir', folder, '--data_dir', test_set[0]), stdout=f,
                               stderr=subprocess.PIPE, env=environment(TF_CONFIG=evaluator))  # fmt: skip
  try:
    for step in (7, 20):
      folder.mkdir(exist_ok=True)
      for name in ('.data-00000-of-00001', '.index'):
        shutil.copy(os.path.join(three_checkpoints, 'model.ckpt-%d' % step) + name, str(folder))
      end = time.time() + PROCESS_SECONDS
      while 'model.ckpt-%d\naccuracy' % step not in out.read_text():
        assert process.poll() is None and time.time() < end
        time.sleep(0.2)
    (folder / network.TRAINING_DONE).touch()
    stderr = process.communicate(timeout=PROCESS_SECONDS)[1].decode()
    assert process.returncode == 0, stderr
    assert_readable(stderr)
    assert re.findall(r'model.ckpt-(\d+)', out.read_text()) == ['7', '20']
  finally:
    process.kill()
    process.wait()


def test_watch_goes_on_while_training_goes_on_in_a_finished_folder(test_set, wide_awake_copy, monkeypatch, capsys):
  marker, looks = os.path.join(wide_awake_copy, network.TRAINING_DONE), []
  open(marker, 'w').close()

  def sleep(_):
    looks.append(os.path.exists(marker))
    if len(looks) == val.POLLS_DONE - 1:
      os.remove(marker)  # train.py has started again
    elif len(looks) == 2 * val.POLLS_DONE:
      open(marker, 'w').close()

  monkeypatch.setattr(val, 'time', types.SimpleNamespace(sleep=sleep))
  call(val, '--watch', '--checkpoint_dir', wide_awake_copy, '--data_dir', test_set[0])
  assert looks == [True] * (val.POLLS_DONE - 1) + [False] * (val.POLLS_DONE + 1) + [True] * val.POLLS_DONE
  assert capsys.readouterr().out.count('\naccuracy ') == 1


def test_wrong_input_is_a_clean_error(test_set, wide_awake, tmp_path):
  folder = test_set[0]
  (tmp_path / 'empty').mkdir()
  for path in ('missing', 'empty', 'empty/model.ckpt-3'):
    line = mistake(val, '--checkpoint_dir', tmp_path / path, '--data_dir', folder)
    assert str(tmp_path / path) in line and 'train.py' in line
  assert clean_error('val.py', tmp_path / path, '--data_dir', folder) == 'error: ' + line
  assert '--watch' in mistake(val, '--all', '--watch')
  assert '--errors' in mistake(val, wide_awake, '--data_dir', folder, '--errors', tmp_path / 'errors.png', '--all')
  assert 'test_batch.bin is a file' in mistake(val, wide_awake, '--data_dir', folder / 'test_batch.bin')
  for path in (os.path.join(wide_awake, 'model.ckpt-7'), os.path.join(wide_awake, 'model.ckpt-7.index')):
    assert 'take a folder' in mistake(val, '--all', path)
  assert 'take a folder' in mistake(val, '--watch', folder / 'test_batch.bin')
  assert 'rename' in mistake(val, '--watch', tmp_path / 'run [1]')


def test_a_report_is_printed_where_summaries_cannot_be_written(test_set, wide_awake_copy, capsys):
  with open(os.path.join(wide_awake_copy, 'eval'), 'w') as f:
    f.write('a file')
  call(val, wide_awake_copy, '--data_dir', test_set[0])
  assert numbers(capsys.readouterr().out)[1] == 37


def test_of_checkpoints_that_cannot_be_read_all_says_so_and_ranks_the_others(test_set, three_checkpoints, capsys):
  for step in (7, 8, 20):
    with open(os.path.join(three_checkpoints, 'model.ckpt-%d.data-00000-of-00001' % step), 'r+b') as f:
      f.truncate(10)
    if step == 8:
      call(val, '--all', three_checkpoints, '--data_dir', test_set[0])
      printed = capsys.readouterr()
      assert printed.out.splitlines()[-1] == 'best: ' + os.path.join(three_checkpoints, 'model.ckpt-20')
      assert all('warning: %s is damaged' % os.path.join(three_checkpoints, name) in printed.err
                 for name in ('model.ckpt-7', 'model.ckpt-8'))  # fmt: skip
  assert 'no checkpoint in the folder' in mistake(val, '--all', three_checkpoints, '--data_dir', test_set[0])


@pytest.mark.parametrize('runs', [3, pytest.param(10, marks=pytest.mark.long)])
def test_validation_during_training_that_deletes_checkpoints(test_set, resumable, small_data, capsys, runs):
  arguments = command('train.py', '--data_dir', small_data, '--checkpoint_dir', resumable, '--batch_size', 2, '--save_steps', 1,
                      '--keep_checkpoints', 1, '--max_steps', 1000000, '--epochs', 100000)  # fmt: skip
  with subprocess.Popen(arguments, stderr=subprocess.PIPE, encoding='utf-8') as process:
    steps = []
    try:
      for line in process.stderr:
        if 'step 3/' in line:
          break
      while len(steps) < runs or len(set(steps)) == 1:
        call(val, '--checkpoint_dir', resumable, '--data_dir', test_set[0])
        stdout = capsys.readouterr().out
        assert numbers(stdout)[1] == 37
        steps.append(re.search(r'model.ckpt-(\d+)', stdout).group(1))
      assert process.poll() is None
    finally:
      process.send_signal(signal.SIGTERM)
      stderr = process.communicate(timeout=PROCESS_SECONDS)[1]
  assert process.returncode == 143, stderr


# ---- the sheet of mistakes


def test_the_most_confident_mistakes_come_first_with_true_and_predicted_class(tmp_path):
  draw = np.random.RandomState(0)
  labels, images = np.array([3, 1, 2, 0]), draw.normal(size=[4, 28, 28, 3]).astype(np.float32)
  logits = np.zeros([4, 10], np.float32)
  logits[0, 5], logits[1, 1], logits[2, 4], logits[3, 9] = 2, 9, 6, 4  # record 1 is right, 2 the surest mistake, 0 the least
  path = str(tmp_path / 'errors.png')
  assert val.draw_errors(path, labels, logits, images, scale=5) == 3
  sheet = np.asarray(Image.open(path))
  height, width = 28 * 5 + 2 * 20 + 8, 28 * 5 + 8
  assert sheet.shape == (height, 8 * width, 3)
  for place, (record, truth, guess) in enumerate([(2, 'bird', 'deer'), (3, 'airplane', 'truck'), (0, 'cat', 'dog')]):
    tile = sheet[4:-4, place * width + 4 : (place + 1) * width - 4]
    assert (tile[2:140:5, 2:140:5] == (images[record] * 64 + 128).clip(0, 255).astype(np.uint8)).all()
    assert (tile[140:160] == val.draw_word(truth, 140, (255, 255, 255))).all()
    assert (tile[160:180] == val.draw_word(guess, 140, (255, 90, 80))).all()
  assert not sheet[:, 3 * width :].any()
  assert val.draw_errors(str(tmp_path / 'none'), labels[1:2], logits[1:2], images[1:2]) == 0
  assert not (tmp_path / 'none').exists()


def test_every_class_name_can_be_drawn_and_looks_its_own():
  words = [val.draw_word(name, 140, (0, 0, 200)) for name in CLASSES]
  assert len({word.tobytes() for word in words}) == 10
  assert {tuple(pixel) for word in words for pixel in word.reshape(-1, 3)} == {(0, 0, 0), (0, 0, 200)}


def test_errors_are_drawn_by_the_command(tmp_path, wide_awake_copy, capsys):
  labels, images = random_records(tmp_path / 'test_batch.bin', 12)
  out = tmp_path / 'new' / 'errors.png'
  call(val, wide_awake_copy, '--data_dir', tmp_path, '--errors', out)
  wrong = int((logits_of(wide_awake_copy, images).argmax(1) != labels).sum())
  assert '%s: %d mistakes' % (out, wrong) in capsys.readouterr().out
  assert Image.open(str(out)).size == (8 * 148, 188 * (1 + (wrong > 8)))
